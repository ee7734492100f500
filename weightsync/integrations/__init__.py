"""What other libraries take as their own."""
