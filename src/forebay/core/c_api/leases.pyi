from forebay.segment.process_identity import INCARNATION_BITS as INCARNATION_BITS
from forebay.segment.process_identity import PID_BITS as PID_BITS
