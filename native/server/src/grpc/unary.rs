//! Calls with one message, which are answered at once by one.
//!
//! `tonic` can do so, too: it is made for streams, and takes as long for such a call as a decision.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::Either;
use hyper::Response;
use hyper::body::{Body, Frame};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use prost::Message;
use tonic::Status;
use tonic::metadata::MetadataValue;

/// Before each message: whether it is compressed, and its size.
const PREFIX: usize = 5;
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");

pub type Replied = Response<Either<Reply, tonic::body::Body>>;

/// Answer a call with these fields and this body.
pub fn answer<In, Out>(fields: &HeaderMap, data: &[u8], decide: impl FnOnce(In) -> Result<Out, Status>) -> Replied
where
    In: Message + Default,
    Out: Message,
{
    reply_of(message_in(fields, data).and_then(decide))
}

/// The reply of a call with this message, or error.
pub fn reply_of(decided: Result<impl Message, Status>) -> Replied {
    match decided {
        Ok(message) => replied(Reply { message: Some(encoded(&message)), has_ended: false }),
        Err(status) => failed(&status),
    }
}

/// The answer to a call that has failed, without a message.
pub fn failed(status: &Status) -> Replied {
    let mut response = replied(Reply { message: None, has_ended: true });
    if status.add_header(response.headers_mut()).is_err() {
        // Its text can't be sent.
        response.headers_mut().insert(Status::GRPC_STATUS, HeaderValue::from(i32::from(status.code())));
    }
    response
}

fn replied(reply: Reply) -> Replied {
    let mut response = Response::new(Either::Left(reply));
    // Room for the date, which hyper adds, too.
    *response.headers_mut() = HeaderMap::with_capacity(2);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// The message of a call with these fields and this body.
pub fn message_in<M: Message + Default>(fields: &HeaderMap, data: &[u8]) -> Result<M, Status> {
    if fields.get(ENCODING).is_some_and(|encoding| encoding != "identity") {
        let mut status = Status::unimplemented("the server takes no compressed messages");
        // By the protocol, the client learns how it may send them.
        status.metadata_mut().insert("grpc-accept-encoding", MetadataValue::from_static("identity"));
        return Err(status);
    }
    let Some((prefix, message)) = data.split_first_chunk::<PREFIX>() else {
        return Err(Status::internal("the call has no whole message"));
    };
    let size = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
    if prefix[0] != 0 || usize::try_from(size) != Ok(message.len()) {
        return Err(Status::internal("the call has something else than one message that isn't compressed"));
    }
    M::decode(message).map_err(|error| Status::invalid_argument(format!("the message can't be read: {error}")))
}

fn encoded(message: &impl Message) -> Bytes {
    let size = message.encoded_len();
    let mut data = Vec::with_capacity(PREFIX + size);
    data.push(0);
    data.extend(u32::try_from(size).expect("a reply is short").to_be_bytes());
    message.encode(&mut data).expect("there is room for it");
    data.into()
}

/// The body of an answer: a message, and then the status, which is 0.
pub struct Reply {
    message: Option<Bytes>,
    has_ended: bool,
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(message) = self.message.take() {
            return Poll::Ready(Some(Ok(Frame::data(message))));
        }
        if self.has_ended {
            return Poll::Ready(None);
        }
        self.has_ended = true;
        let mut fields = HeaderMap::with_capacity(1);
        fields.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
        Poll::Ready(Some(Ok(Frame::trailers(fields))))
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::fuzz::Target;
    use crate::grpc::messages::auth::CheckRequest;
    use crate::grpc::messages::health::HealthCheckRequest;
    use crate::grpc::messages::ratelimit::RateLimitRequest;

    /// A descriptor of `user` with hits of its own; a request with a path, a field and a client; a service.
    pub const MESSAGES: Target = Target {
        name: "messages",
        seeds: &[
            b"\0\0\0\0\x1f\x0a\x06limits\x12\x13\x0a\x0d\x0a\x04user\x12\x05alice\x1a\x02\x08\x03\x18\x07",
            b"\0\0\0\0\x30\x0a.\x0a\x0f\x0a\x0d\x0a\x0b\x12\x09192.0.2.1\"\
                \x1b\x12\x19\x12\x03GET\x1a\x0a\x0a\x04host\x12\x02ab\"\x06/login",
            b"\0\0\0\0\x06\x0a\x04grpc",
        ],
        check: bytes_are_a_message_or_an_error,
    };

    fn bytes_are_a_message_or_an_error(data: &[u8]) -> bool {
        let is_read = reads_any(data);
        // With the size that it has: else most would be refused for that.
        let mut data = data.to_vec();
        let size = data.len().saturating_sub(PREFIX) as u32;
        if let Some(prefix) = data.first_chunk_mut::<PREFIX>() {
            prefix[0] = 0;
            prefix[1..].copy_from_slice(&size.to_be_bytes());
        }
        reads_any(&data);
        is_read
    }

    fn reads_any(data: &[u8]) -> bool {
        let read = [reads::<RateLimitRequest>(data), reads::<CheckRequest>(data), reads::<HealthCheckRequest>(data)];
        read.contains(&true)
    }

    /// Whether the message was read. It is written as it was read.
    fn reads<M: Message + Default + PartialEq>(data: &[u8]) -> bool {
        let fields = HeaderMap::new();
        let mut read = None;
        let replied = answer(&fields, data, |message: M| {
            read = Some(message);
            Ok(HealthCheckRequest::default())
        });
        assert_eq!(read.is_none(), replied.headers().contains_key("grpc-status"));
        let Some(message) = read else { return false };
        assert!(message_in::<M>(&fields, &encoded(&message)).is_ok_and(|again| again == message));
        true
    }
}
