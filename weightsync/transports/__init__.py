"""Links: how messages and their payloads travel between one sender and one worker.

Adapters know neither models nor clocks. `base` defines what a link is. `pipe` has links over a duplex
`multiprocessing` connection, with large payloads in shared memory (`buffers`). `local` has links inside one process,
over a network that a test controls.
"""
