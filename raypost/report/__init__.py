"""The report: the run folder's files, the figures made of them, and how both are shown."""
