"""The protocol as data: routes, bodies, problems, spellings. No framework, no engine."""
