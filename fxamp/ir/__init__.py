"""What is known about a graph: facts of values, regions, casts, operators, and its text."""
