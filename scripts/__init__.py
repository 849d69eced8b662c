"""What is run now and then: each module says by what command."""
