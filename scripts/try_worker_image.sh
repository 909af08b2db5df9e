#!/bin/sh
# Build docker/worker.Dockerfile as it stands, on a bare Debian in place of vLLM's image (10 GB, and no engine
# runs without a GPU), and see that the worker in it starts. Needs root, debootstrap and buildah; no daemon.
#
# usage: scripts/try_worker_image.sh        (three minutes; all it makes is in a temporary folder)
set -eu
cd "$(dirname "$0")/.."

work=$(mktemp -d)
buildah() { command buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"; }
clean() {
    buildah rm --all >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap clean EXIT

version=$(sed -n 's/^ARG VLLM_VERSION=//p' docker/worker.Dockerfile)
base="docker.io/vllm/vllm-openai:$version"

debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip bookworm "$work/debian"
cp /etc/ssl/certs/ca-certificates.crt "$work/debian/etc/ssl/certs/"
rm -f "$work"/debian/usr/lib/python3*/EXTERNALLY-MANAGED # Debian's rule, not vLLM's image's
tar -C "$work/debian" -cf "$work/debian.tar" .
rm -rf "$work/debian"
empty=$(buildah from scratch)
buildah add --quiet "$empty" "$work/debian.tar" /
buildah commit --quiet --rm "$empty" "$base"

buildah build --isolation chroot --pull=never --file docker/worker.Dockerfile --tag worker .

worker=$(buildah from --pull=never localhost/worker)
user=$(buildah run --isolation chroot "$worker" -- id -u)
test "$user" = 10001
buildah run --isolation chroot "$worker" -- python3 -c "import getpass; getpass.getuser()"
buildah run --isolation chroot "$worker" -- python3 -m airflow_batchinfer.worker --help
echo "the worker starts in the image, as user $user"
