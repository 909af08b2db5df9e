#!/bin/sh
# Print a Python that can build the environments, or say that there is none.
set -eu

for python in "${PYTHON:-}" python3.11 python3 python3.12 python3.13 python3.14 python; do
    if [ -n "$python" ] &&
        "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
        command -v "$python"
        exit 0
    fi
done
echo "No Python 3.11 to 3.14 found. Install Python 3.11, or name one: make PYTHON=/path/to/python3.11" >&2
exit 1
