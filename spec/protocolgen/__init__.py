"""What `spec/generate.py` is made of: reading and checking `protocol.toml`, and rendering it.

Pure functions over the standard library. `source` reads, `checks` refuses, `python`, `tla` and `docs` render.
"""
