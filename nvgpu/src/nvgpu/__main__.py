"""Print the folder of a runtime: export CUSTOM_DEVICE_ROOT=$(python -m nvgpu host)"""

import sys

from nvgpu import root

if len(sys.argv) != 2:
    print("usage: python -m nvgpu {host|cuda}", file=sys.stderr)
    sys.exit(2)
try:
    print(root(sys.argv[1]))
except (ValueError, FileNotFoundError) as error:
    print(error, file=sys.stderr)
    sys.exit(2)
