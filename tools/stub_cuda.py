"""Let a CUDA build of torch be imported on a machine without CUDA: small libraries in place of those that it asks for.

    python tools/stub_cuda.py SITE_PACKAGES/torch

Reads from torch's own libraries which others they need and which symbols they take from them, and writes libraries with
those names into ``torch/lib``. Every function returns 0, and there are no devices. For the CPU only; needs gcc, readelf
and nm.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libgomp.so.1", "libpthread.so.0", "libdl.so.2")
VENDOR = re.compile(r"(_*nv|_*cu|nccl|ncl|_*cuda|CUPTI|cupti|pncl)", re.IGNORECASE)
BODIES = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { if (n) *n = 0; return 100; }",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "no CUDA here (stub)"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "cudaErrorNoDevice"; }',
    "__cudaRegisterFatBinary": "static void *f[8]; void **__cudaRegisterFatBinary(void *p) { return f; }",
}
Wanted = dict[str, dict[str, set[str]]]


def told(*command: str) -> list[str]:
    """What a program prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def system_libraries() -> dict[str, str]:
    """Path by name of the libraries that the machine has."""
    rows = [line.split() for line in told("/sbin/ldconfig", "-p")[1:] if "=>" in line]
    return {row[0]: row[-1] for row in reversed(rows)}


def needed(objects: list[Path], present: set[str]) -> list[str]:
    """Libraries that some object needs and nobody has."""
    found = dict.fromkeys(
        name
        for path in objects
        for line in told("readelf", "-d", str(path))
        for name in re.findall(r"NEEDED\).*\[(.*)\]", line)
    )
    return [name for name in found if name not in present]


def versions(objects: list[Path], missing: list[str]) -> dict[str, set[str]]:
    """Per missing library the symbol versions that are asked of it."""
    found: dict[str, set[str]] = {name: set() for name in missing}
    for path in objects:
        library = ""
        for line in told("readelf", "-V", "-W", str(path)):
            file, version = re.search(r"File: (\S+)", line), re.search(r"Name: (\S+)\s+Flags", line)
            library = file.group(1) if file else library
            if version and library in found:
                found[library].add(version.group(1))
    return found


def defined(paths: list[str]) -> set[str]:
    """Symbols that some libraries have."""
    lines = [line for path in paths for line in told("nm", "-D", "--defined-only", path)]
    return {line.split()[-1].partition("@")[0] for line in lines if line}


def wanted(objects: list[Path], asked: dict[str, set[str]], known: set[str]) -> Wanted:
    """Per missing library and version the symbols that it must have."""
    owner = {version: library for library, names in asked.items() for version in names}
    catch = next((name for name in asked if name.startswith(("libnccl", "libcudart"))), "")
    found: Wanted = {name: defaultdict(set) for name in asked}
    for path in objects:
        for line in told("nm", "-D", "--undefined-only", "--with-symbol-versions", str(path)):
            kind, symbol = line.split()[-2:]
            if kind.lower() != "u":  # weak ones may stay open
                continue
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            if version in owner:
                found[owner[version]][version].add(name)
            elif not version and catch and name not in known and VENDOR.match(name):
                found[catch][""].add(name)
    return found


def build(library: Path, symbols: dict[str, set[str]], asked: set[str]) -> int:
    """Compile one library; returns how many functions it has."""
    names = sorted(set().union(*symbols.values()))
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "stub.map")
        source.write_text("".join(BODIES.get(name, f"long {name}() {{ return 0; }}") + "\n" for name in names) + "\n")
        blocks = [(version, "; ".join(sorted(symbols.get(version, ())))) for version in sorted(asked)]
        script.write_text("".join(f"{v} {{ {f'global: {each};' if each else ''} }};\n" for v, each in blocks))
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(library), str(source)]
        command += [f"-Wl,-soname,{library.name}", *([f"-Wl,--version-script={script}"] if asked else [])]
        subprocess.run(command, check=True)
    return len(names)


def main(torch: Path) -> None:
    """Write all stubs for one installation of torch."""
    objects = [*torch.glob("lib/*.so*"), *torch.glob("_C*.so")]
    system = system_libraries()
    asked = versions(objects, needed(objects, {path.name for path in objects} | set(system)))
    known = defined([str(path) for path in objects] + [system[name] for name in SYSTEM if name in system])
    for name, symbols in wanted(objects, asked, known).items():
        print(f"{name}: {build(torch / 'lib' / name, symbols, asked[name])} functions")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
