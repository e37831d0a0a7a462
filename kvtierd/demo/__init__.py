"""The main job in one command: a real daemon, real clients, a public trace, and a check of every byte."""
