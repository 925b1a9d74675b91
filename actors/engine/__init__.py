"""What all engines share: how one starts, is watched and ends, and the vLLM engine itself."""
