"""Files that survive a death: lines appended whole, a disk that refuses, and who owns a run's folder."""
