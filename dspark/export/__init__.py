"""Our weights in the layout that runtimes load, and back."""
