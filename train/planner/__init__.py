"""What a step takes, by its trace and by the compiler, and which settings fit."""
