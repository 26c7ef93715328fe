#!/usr/bin/env bash
# Makes one of the two environments afresh, from its pinned list. `make setup` calls it, the images'
# builds (`runtime`: the product's without the tools of the tests), and `batchyard engine install`,
# for which the wheel has a copy of it and of the folder engine.
#
#   PYTHON=python3.11 infra/environment.sh product|runtime|engine-cpu|engine-cuda FOLDER
#   DATASETS=yes      with the extra `datasets`, for `runtime`; `product` always has it
#   HUB=yes           the same with the extra `hub`
set -euo pipefail

environment=$1
folder=$2
python=${PYTHON:-python3}
here=$(dirname -- "${BASH_SOURCE[0]}")
torch_index=https://download.pytorch.org/whl/cpu

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

check_machine() {
    [[ $(uname -s) == Linux ]] ||
        fail "this is $(uname -s), and vLLM's wheels are for Linux. Use a Linux machine or container."
    [[ $environment != engine-cpu || $(uname -m) == x86_64 ]] ||
        fail "the CPU engine is pinned for x86_64, and this is $(uname -m). Use another machine, or DEVICE=cuda."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Batchyard needs Python 3.11 or later, and '$python' is not." \
            "Name another one: make setup PYTHON=python3.11"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$python' cannot make virtual environments." \
            "Install its venv package (Debian, Ubuntu: apt install python3-venv), or name another Python: PYTHON=..."
}

announce() {
    echo "$1; pip is quiet meanwhile"
}

make_folder() {
    "$python" -m venv --clear "$folder"
}

pip_install_unchecked() {
    "$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-deps "$@"
}

# Every archive must be one of those that the list was made with, wherever it comes from.
pip_install() {
    pip_install_unchecked --require-hashes "$@"
}

# First whatever pip is configured for (a folder of wheels, a mirror): the network may have no way
# out. Nothing on PyPI has a "+cpu" version, so elsewhere that attempt ends in a second or two.
install_cpu_torch() {
    local pins=$here/engine/torch-cpu.txt log torch
    local quickly=(pip_install --retries 1 --timeout 15 -r "$pins")
    torch=$(grep -o '^torch[^ ]*' "$pins")
    if ! "$folder/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        announce "torch-cpu.txt has the hash for Python 3.11 only: $torch is not checked"
        quickly=(pip_install_unchecked --retries 1 --timeout 15 "$torch")
    fi
    log=$(mktemp)
    "${quickly[@]}" 2>"$log" || "${quickly[@]}" --index-url "$torch_index" 2>>"$log" || {
        cat "$log" >&2
        rm -f "$log"
        fail "no CPU build of torch: neither pip's own sources nor $torch_index has" \
            "  $torch" \
            "Let this machine reach that address (a proxy: HTTPS_PROXY=...), or fetch the wheel elsewhere and run" \
            "  PIP_FIND_LINKS=/folder/with/the/wheel make setup"
    }
    rm -f "$log"
}

check_machine
case $environment in
product)
    announce "product environment: about 900 MB, one minute"
    make_folder
    pip_install -r "$here"/../requirements/dev.txt
    ;;
runtime)
    announce "the product's dependencies"
    make_folder
    pip_install -r "$here"/../requirements/runtime.txt
    [[ ${DATASETS:-no} != yes ]] || pip_install -r "$here"/../requirements/datasets.txt
    [[ ${HUB:-no} != yes ]] || pip_install -r "$here"/../requirements/hub.txt
    ;;
engine-cpu)
    announce "engine environment, CPU: about 2.5 GB, two minutes"
    make_folder
    install_cpu_torch
    pip_install -r "$here"/engine/requirements-cpu.txt
    cp "$here"/engine/*-cpu.pth "$folder"/lib/python3*/site-packages/
    ;;
engine-cuda)
    announce "engine environment, CUDA: about 10 GB, several minutes"
    make_folder
    pip_install -r "$here"/engine/requirements-cuda.txt
    ;;
*)
    fail "no such environment: $environment"
    ;;
esac
