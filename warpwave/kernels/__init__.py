"""The attention kernels, one idea a file."""

import time

IMPORTED_AT = time.time()  # no kernel's source has been read yet
