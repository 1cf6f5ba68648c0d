import os

# Before torch is imported, here and in every process that a test starts: on tensors this small, threads cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
