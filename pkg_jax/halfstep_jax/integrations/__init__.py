"""What trainers ask for in forms of their own: modules that import the library that they are for."""
