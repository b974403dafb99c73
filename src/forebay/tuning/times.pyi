from forebay.clock import MAX_NS as MAX_NS
