"""How good a draft is: tasks, measurement and report."""
