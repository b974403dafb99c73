"""What ``forebay serve`` does before a request comes: it reads a rule file, and hands a plan to `forebay_server`.

`forebay_server` is a distribution of its own, in Rust (native/server), which decides by the plan without Python.
`unserved` refuses rules that it can't decide, `plan` writes the others as plain data, and `live` does so for each
version of live rules. Limits over Redis are charged by Python: `gated` is their plan, and `charging` what the server
asks. `taken`, `leases` and `first_answers` are what it remembers between two questions.
"""
