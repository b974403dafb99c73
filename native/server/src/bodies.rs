//! The bodies of questions: each is small, comes soon, and all of them together have a bound.

use std::future::{Future, poll_fn};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::StatusCode;
use hyper::body::Body;
use tokio::time::timeout;

/// Bytes of all bodies that are under way. A connection of HTTP/2 can send many at once.
const MOST: usize = 64 << 20;
/// Bytes of each body that don't count: large bodies without an end leave usual questions their answers.
const FREE: usize = 4 << 10;
/// For a whole body.
const TIME: Duration = Duration::from_secs(10);

/// The bytes of the bodies that are under way, in all threads.
#[derive(Default)]
pub struct Bodies(AtomicUsize);

/// The part of one body. It ends with the body.
struct Held<'a> {
    all: &'a AtomicUsize,
    size: usize,
}

impl Held<'_> {
    /// Whether there is room for more.
    fn grow(&mut self, more: usize) -> bool {
        let before = self.counted();
        self.size += more;
        let counted = self.counted() - before;
        counted == 0 || self.all.fetch_add(counted, Ordering::Relaxed) + counted <= MOST
    }

    fn counted(&self) -> usize {
        self.size.saturating_sub(FREE)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.counted() > 0 {
            self.all.fetch_sub(self.counted(), Ordering::Relaxed);
        }
    }
}

/// Why a body can't be had, for its client.
pub type Refusal = (StatusCode, String);

impl Bodies {
    /// A whole body, of at most so many bytes.
    pub async fn read<B>(&self, body: B, largest: usize) -> Result<Vec<u8>, Refusal>
    where
        B: Body,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let mut collected = std::pin::pin!(self.collected(body, largest));
        // Most are there with their head: no clock for them.
        if let Poll::Ready(result) = poll_fn(|context| Poll::Ready(collected.as_mut().poll(context))).await {
            return result;
        }
        match timeout(TIME, collected).await {
            Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "the body took too long".to_owned())),
            Ok(result) => result,
        }
    }

    async fn collected<B>(&self, body: B, largest: usize) -> Result<Vec<u8>, Refusal>
    where
        B: Body,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let mut held = Held { all: &self.0, size: 0 };
        let mut body = std::pin::pin!(Limited::new(body, largest));
        // Copied: a part of one byte may keep a large buffer alive.
        let mut data = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(part) = frame.map_err(|error| refusal(error, largest))?.into_data() else { continue };
            append(&mut data, part);
            if !held.grow(data.len() - held.size) {
                let reason = "the server is reading too many bodies: ask again";
                return Err((StatusCode::SERVICE_UNAVAILABLE, reason.to_owned()));
            }
        }
        Ok(data)
    }
}

fn append(data: &mut Vec<u8>, mut part: impl bytes::Buf) {
    while part.has_remaining() {
        let chunk = part.chunk();
        data.extend_from_slice(chunk);
        let size = chunk.len();
        part.advance(size);
    }
}

fn refusal(error: Box<dyn std::error::Error + Send + Sync>, largest: usize) -> Refusal {
    if error.is::<LengthLimitError>() {
        return (StatusCode::PAYLOAD_TOO_LARGE, format!("a body has at most {largest} bytes"));
    }
    (StatusCode::BAD_REQUEST, "the body can't be read".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bodies_together_have_a_bound() {
        let all = AtomicUsize::new(0);
        let mut most = Held { all: &all, size: 0 };
        assert!(most.grow(MOST + FREE));
        {
            let mut more = Held { all: &all, size: 0 };
            assert!(more.grow(FREE), "a small body has room");
            assert!(!more.grow(1));
        }
        assert_eq!(all.load(Ordering::Relaxed), MOST);
        drop(most);
        assert_eq!(all.load(Ordering::Relaxed), 0);
        assert!(Held { all: &all, size: 0 }.grow(FREE + 1));
    }
}
