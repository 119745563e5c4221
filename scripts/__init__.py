"""Programs of the repository, which are not installed. A package, so that no other package of this name hides it."""
