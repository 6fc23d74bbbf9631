"""Tables, pictures and pages of everything that is registered, for posenc list, posenc plot and
docs/.
"""
