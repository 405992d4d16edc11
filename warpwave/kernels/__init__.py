"""The attention kernels, one idea a file."""
