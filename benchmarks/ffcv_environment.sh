#!/bin/bash
# Make an environment of its own for FFCV, which benchmarks/ffcv_peer.py runs in: ffcv_environment.sh [DIR]
#
# FFCV is no dependency of shardwright. It is built here from its source, with the OpenCV and TurboJPEG of the
# system, and without what it requires on paper but does not import. Made once, and anew when the pins change.
set -euo pipefail
directory=${1:-build/ffcv}
python=${PYTHON:-python3}
ffcv=ffcv==1.0.2
pins=(setuptools==84.2.1 torch==2.13.0 numba==0.68.1 numpy==2.4.6 opencv-python-headless==5.0.0.93
  pillow==13.0.0 tqdm==4.70.1)

wanted="$("$python" -VV) $ffcv ${pins[*]}"
if [ "$(cat "$directory/.ready" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

if ! { command -v g++ && pkg-config --exists opencv4 libturbojpeg; } >/dev/null; then
  packages=(g++ pkg-config libopencv-dev libturbojpeg0-dev)
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "$0: FFCV is built from source: as root, apt-get install ${packages[*]}" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${packages[@]}" >/dev/null
fi

"$python" -m venv --clear "$directory"
pip=("$directory/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install --only-binary=:all: "${pins[@]}"
"${pip[@]}" install --no-build-isolation --no-deps "$ffcv"
# Numba takes its threads from TBB, which OpenCV brings, where it can load it. It must: those of OpenMP spin, and on
# cores that others use too FFCV then gave a fifth of the images a second.
"$directory/bin/python" -P -c 'import ffcv.fields, ffcv.loader, ffcv.transforms, ffcv.writer, numba.np.ufunc.tbbpool'
printf '%s\n' "$wanted" >"$directory/.ready"
