capsule: object
