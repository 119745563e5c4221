"""The sampling part of Tinker's API: clients sample, and poll for results by their ids. Nothing is trained."""
