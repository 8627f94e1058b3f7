"""The one seam to jaxprs, JAX's traced programs: the only package that imports `jax.extend`.

`jax.extend.core` is no stable interface: primitives and their parameters are renamed between releases. Every primitive
name and parameter that zero_jax reads is here, and `tests/seams` checks each of them. Other packages see a
jaxpr's structure (`eqns`, `invars`, `outvars`, `aval`, `replace`) and ask these modules about the rest: `equations`
traces functions, builds and evaluates equations; `primitives` reads their parameters; `passes` edits programs;
`named_call` makes primitives of our own; `shared_calls` lets JAX differentiate equal equations once; `random_keys`
finds inputs that are keys.
"""
