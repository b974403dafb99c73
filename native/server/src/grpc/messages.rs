//! The parts of Envoy's and gRPC's messages that the server reads and writes. Other fields of a message are skipped.
//!
//! They are declared by hand: a build needs no protoc, and a request's other parts cost nothing. Each struct has the
//! name of its message; `tests/server/test_server_messages.py` compares names, numbers and types with Envoy's own.

use std::collections::BTreeMap;

use prost::{Enumeration, Message};

use crate::answers::Fields;

/// `envoy.service.ratelimit.v3`.
pub mod ratelimit {
    use super::*;

    #[derive(Clone, PartialEq, Message)]
    pub struct RateLimitRequest {
        #[prost(string, tag = "1")]
        pub domain: String,
        #[prost(message, repeated, tag = "2")]
        pub descriptors: Vec<RateLimitDescriptor>,
        #[prost(uint32, tag = "3")]
        pub hits_addend: u32,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct RateLimitDescriptor {
        #[prost(message, repeated, tag = "1")]
        pub entries: Vec<Entry>,
        #[prost(message, optional, tag = "2")]
        pub limit: Option<RateLimitOverride>,
        /// A `UInt64Value`.
        #[prost(message, optional, tag = "3")]
        pub hits_addend: Option<u64>,
        #[prost(bool, tag = "4")]
        pub is_negative_hits: bool,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Entry {
        #[prost(string, tag = "1")]
        pub key: String,
        #[prost(string, tag = "2")]
        pub value: String,
    }

    /// Only whether there is one.
    #[derive(Clone, Copy, PartialEq, Message)]
    pub struct RateLimitOverride {}

    #[derive(Clone, PartialEq, Message)]
    pub struct RateLimitResponse {
        #[prost(enumeration = "Code", tag = "1")]
        pub overall_code: i32,
        #[prost(message, repeated, tag = "2")]
        pub statuses: Vec<DescriptorStatus>,
        #[prost(message, repeated, tag = "3")]
        pub response_headers_to_add: Vec<HeaderValue>,
        #[prost(bytes = "vec", tag = "5")]
        pub raw_body: Vec<u8>,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Enumeration)]
    pub enum Code {
        Unknown = 0,
        Ok = 1,
        OverLimit = 2,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct DescriptorStatus {
        #[prost(enumeration = "Code", tag = "1")]
        pub code: i32,
        #[prost(message, optional, tag = "2")]
        pub current_limit: Option<RateLimit>,
        #[prost(uint32, tag = "3")]
        pub limit_remaining: u32,
        #[prost(message, optional, tag = "4")]
        pub duration_until_reset: Option<Duration>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct RateLimit {
        #[prost(uint32, tag = "1")]
        pub requests_per_unit: u32,
        #[prost(enumeration = "Unit", tag = "2")]
        pub unit: i32,
        #[prost(string, tag = "3")]
        pub name: String,
        /// A `UInt32Value`: so many units. None is one.
        #[prost(message, optional, tag = "4")]
        pub unit_multiplier: Option<u32>,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Enumeration)]
    pub enum Unit {
        Unknown = 0,
        Second = 1,
        Minute = 2,
        Hour = 3,
        Day = 4,
        Week = 7,
    }

    #[derive(Clone, Copy, PartialEq, Message)]
    pub struct Duration {
        #[prost(int64, tag = "1")]
        pub seconds: i64,
        #[prost(int32, tag = "2")]
        pub nanos: i32,
    }
}

/// Of `envoy.config.core.v3`.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
    #[prost(bytes = "vec", tag = "3")]
    pub raw_value: Vec<u8>,
}

/// Fields for a response. The length is that of the body, whatever a rule's own response says.
pub fn fields_of(fields: Fields) -> Vec<HeaderValue> {
    let sent = fields.into_iter().filter(|(name, _)| !name.eq_ignore_ascii_case("content-length"));
    sent.map(|(key, value)| HeaderValue { key, value, raw_value: Vec::new() }).collect()
}

/// `envoy.service.auth.v3`.
pub mod auth {
    use super::*;

    #[derive(Clone, PartialEq, Message)]
    pub struct CheckRequest {
        #[prost(message, optional, tag = "1")]
        pub attributes: Option<AttributeContext>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct AttributeContext {
        #[prost(message, optional, tag = "1")]
        pub source: Option<Peer>,
        #[prost(message, optional, tag = "4")]
        pub request: Option<Request>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Peer {
        #[prost(message, optional, tag = "1")]
        pub address: Option<Address>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Address {
        #[prost(message, optional, tag = "1")]
        pub socket_address: Option<SocketAddress>,
        #[prost(message, optional, tag = "2")]
        pub pipe: Option<Pipe>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct SocketAddress {
        #[prost(string, tag = "2")]
        pub address: String,
    }

    /// Only whether it is one.
    #[derive(Clone, Copy, PartialEq, Message)]
    pub struct Pipe {}

    #[derive(Clone, PartialEq, Message)]
    pub struct Request {
        #[prost(message, optional, tag = "2")]
        pub http: Option<HttpRequest>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct HttpRequest {
        #[prost(string, tag = "2")]
        pub method: String,
        #[prost(btree_map = "string, string", tag = "3")]
        pub headers: BTreeMap<String, String>,
        #[prost(string, tag = "4")]
        pub path: String,
        #[prost(message, optional, tag = "13")]
        pub header_map: Option<HeaderMap>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct HeaderMap {
        #[prost(message, repeated, tag = "1")]
        pub headers: Vec<HeaderValue>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct CheckResponse {
        #[prost(message, optional, tag = "1")]
        pub status: Option<Status>,
        #[prost(message, optional, tag = "2")]
        pub denied_response: Option<DeniedHttpResponse>,
        #[prost(message, optional, tag = "3")]
        pub ok_response: Option<OkHttpResponse>,
    }

    /// Of `google.rpc`.
    #[derive(Clone, Copy, PartialEq, Message)]
    pub struct Status {
        #[prost(int32, tag = "1")]
        pub code: i32,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct DeniedHttpResponse {
        #[prost(message, optional, tag = "1")]
        pub status: Option<HttpStatus>,
        #[prost(message, repeated, tag = "2")]
        pub headers: Vec<HeaderValueOption>,
        #[prost(string, tag = "3")]
        pub body: String,
    }

    #[derive(Clone, Copy, PartialEq, Message)]
    pub struct HttpStatus {
        /// The status as a number: in Envoy's message, an enumeration of them.
        #[prost(int32, tag = "1")]
        pub code: i32,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct OkHttpResponse {
        #[prost(message, repeated, tag = "6")]
        pub response_headers_to_add: Vec<HeaderValueOption>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct HeaderValueOption {
        #[prost(message, optional, tag = "1")]
        pub header: Option<HeaderValue>,
    }
}

/// `grpc.health.v1`.
pub mod health {
    use super::*;

    #[derive(Clone, PartialEq, Message)]
    pub struct HealthCheckRequest {
        #[prost(string, tag = "1")]
        pub service: String,
    }

    #[derive(Clone, Copy, PartialEq, Message)]
    pub struct HealthCheckResponse {
        #[prost(enumeration = "ServingStatus", tag = "1")]
        pub status: i32,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Enumeration)]
    pub enum ServingStatus {
        Unknown = 0,
        Serving = 1,
        NotServing = 2,
        ServiceUnknown = 3,
    }
}
