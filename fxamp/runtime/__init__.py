"""From a rewritten graph to a module that runs: flat code, programs and their guards, eager pieces."""
