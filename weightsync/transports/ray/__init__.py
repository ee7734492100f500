"""Links to Ray actors."""
