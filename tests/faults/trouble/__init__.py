"""Storage that fails or lies during a program's saves: the exceptions, and the state afterwards."""
