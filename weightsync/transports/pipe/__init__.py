"""Links over a duplex `multiprocessing` connection."""
