"""The page of evaluations: tables, charts, and texts that show who wrote what."""
