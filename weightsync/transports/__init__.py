"""Links: how messages and their payloads travel between one sender and one worker.

Adapters know neither models nor clocks. `base` defines what a link is, and `buffers` the memory that payloads are in.
`pipe` has links over a duplex `multiprocessing` connection, and `store` links whose ends find each other in a TCPStore.
`calls` has what all links over calls share, and `ray` and `rpc` two kinds of them.
"""
