"""One self-contained HTML page about a store and the model that chooses by it."""
