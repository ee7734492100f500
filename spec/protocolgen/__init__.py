"""The parts of `spec/generate.py`: `source` reads `protocol.toml`, `checks` validates it, the other modules render it.

Pure functions; standard library only.
"""
