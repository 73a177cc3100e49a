"""Several nodes in one view: what each shows of itself, plans over all of them, and orders that carry them out."""
