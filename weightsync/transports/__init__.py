"""Links: how messages and their payloads travel between one sender and one worker.

Adapters know neither models nor clocks. `base` says what a link is; `pipe` is one over a duplex
`multiprocessing` connection, with large payloads in shared memory (`memory`); `local` is one inside a
process, over a network that a test controls.
"""
