"""`sundog isa`: what the compilers make of a kernel."""
