"""What recorded confidences are good for: temperatures that make them survival probabilities, and budgets.

A folder of its own, for dspark/eval is full.
"""
