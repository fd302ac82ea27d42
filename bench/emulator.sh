#!/usr/bin/env bash
# Compiles the emulator of nes-py 8 (Super Mario Bros.) anew for this machine, all of it at once and by a profile of the game,
# and puts it in the place of the installed one: the same frames, half as many again a second. Needs g++.
#   bench/emulator.sh [PYTHON] [SOURCES.tar.gz]      PYTHON has nes-py (default: .venv/bin/python); sources come from PyPI
# To undo: pip install --force-reinstall --no-deps nes-py
set -euo pipefail
[ "$(uname -s)" = Linux ] || { echo "This is for Linux and g++."; exit 2; }
command -v g++ > /dev/null || { echo "There is no g++; install it (Debian: apt install g++)."; exit 2; }
python=$(command -v "${1:-.venv/bin/python}") || { echo "There is no ${1:-.venv/bin/python}; name the Python that has nes-py."; exit 2; }
case $python in /*) ;; *) python=$PWD/$python ;; esac
given=${2:-}
case $given in "" | /*) ;; *) given=$PWD/$given ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

{ read -r version && read -r library && read -r rom; } < <("$python" - <<'PY' 2> /dev/null
import importlib.metadata, importlib.util, pathlib
folder = lambda name: pathlib.Path(importlib.util.find_spec(name).origin).parent
library, = folder("nes_py").glob("lib_nes_env*.so")
rom = folder("gym_super_mario_bros") / "_roms" / "super-mario-bros.nes"
print(importlib.metadata.version("nes-py"), library, rom, sep="\n")
PY
) || { echo "$python has no emulator to compile anew; install it: pip install 'redline[mario]'."; exit 2; }
case $version in 8.*) ;; *) echo "nes-py is $version; this was written for 8."; exit 2 ;; esac
if [ -z "$given" ]; then
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary nes-py -d "$work" "nes-py==$version"
    given=$(ls "$work"/nes[-_]py-*.tar.gz)
fi
tar xzf "$given" -C "$work"
sources=$(ls -d "$work"/nes[-_]py-*/nes_py/nes)

cat > "$work/play.py" <<'PY'
"""Frames a second of a library, and what the game's memory was on the way."""
import ctypes, hashlib, random, sys, time

library, rom = sys.argv[1:]
nes = ctypes.CDLL(library)
nes.Initialize.argtypes, nes.Initialize.restype = [ctypes.c_wchar_p], ctypes.c_void_p
nes.Controller.argtypes, nes.Controller.restype = [ctypes.c_void_p, ctypes.c_uint], ctypes.c_void_p
nes.Memory.argtypes, nes.Memory.restype = [ctypes.c_void_p], ctypes.c_void_p
nes.Screen.argtypes, nes.Screen.restype = [ctypes.c_void_p], ctypes.c_void_p
nes.Step.argtypes = nes.Reset.argtypes = [ctypes.c_void_p]
game = nes.Initialize(rom)
nes.Reset(game)
pressed = ctypes.c_ubyte.from_address(nes.Controller(game, 0))
seen = [(ctypes.c_ubyte * size).from_address(at(game)) for at, size in ((nes.Memory, 2048), (nes.Screen, 4 * 240 * 256))]
luck, digest, began, frames = random.Random(0), hashlib.sha256(), time.perf_counter(), 2000
for frame in range(frames):
    if frame < 200:
        pressed.value = 8 if frame % 20 < 3 else 0  # start
    elif frame % 12 == 0 or frame == 200:
        pressed.value = luck.choice((128, 129, 130, 131))  # to the right
    nes.Step(game)
    if frame % 50 == 0:
        for what in seen:
            digest.update(bytes(what))
print(f"{frames / (time.perf_counter() - began):.0f}", digest.hexdigest())
PY

printf '#include "%s"\n' "$sources"/src/*.cpp "$sources"/src/mappers/*.cpp > "$work/all.cpp"
native=-march=native
[ "$(uname -m)" = aarch64 ] && native=-mcpu=native
build() { g++ -std=c++14 -O3 $native -fPIC -shared -fno-semantic-interposition -w -I"$sources/include" "$work/all.cpp" -o "$work/new.so" "$@"; }
cd "$work"
echo "Compiling, playing and compiling again; half a minute."
build -fprofile-generate="$work/profile"
"$python" play.py ./new.so "$rom" > /dev/null
build -fprofile-use="$work/profile"
read -r before was < <("$python" play.py "$library" "$rom")
read -r after is < <("$python" play.py ./new.so "$rom")
[ "$was" = "$is" ] || { echo "The new emulator plays otherwise; the old one stays."; exit 1; }
cp new.so "$library.new"
mv "$library.new" "$library"  # processes that play go on with the old one
echo "Frames a second of one emulator: $before before, $after now. Memory and screens are the same."
