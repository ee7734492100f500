"""The drivers: they join a machine, its pure half and its links, and execute effects. They know no time."""
