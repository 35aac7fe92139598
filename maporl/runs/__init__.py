"""The functions behind the commands: train, evaluate, play and push. Python code may call them too."""
