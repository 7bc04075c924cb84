"""From a GPU kernel's source to its launch, whatever language it is written in."""
