"""The pure halves of sender and receiver, their tables and their messages. The protocol is changed here.

Each pure half is one function, `step`: name the input, look up its row, return the next data and the effects. The
package imports no clock, no I/O, no torch and no transport.
"""
