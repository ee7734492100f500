"""Renders `spec/protocol.toml`, the one source of the protocol.

python spec/generate.py            writes weightsync/_tables.py
python spec/generate.py --check    compares byte for byte, writes nothing; exit status 1 on a difference
"""

from __future__ import annotations

from pathlib import Path

from protocolgen import python, source

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    protocol = source.read((ROOT / "spec/protocol.toml").read_text())
    (ROOT / "weightsync/_tables.py").write_text(python.render(protocol))
