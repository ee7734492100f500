"""Runs the machines: drivers execute their effects; sender and receiver are what users hold."""
