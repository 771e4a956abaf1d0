"""What is known about a graph: facts of values, regions, operators, modules, source lines, and its text."""
