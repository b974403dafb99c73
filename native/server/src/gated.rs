//! Requests about limits that Python charges: as `http` answers those about limits in the memory of the host.

use std::net::IpAddr;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};

use crate::answers;
use crate::api;
use crate::charging_by_gate::ForGate;
use crate::decide::{Mode, Outcome, Worker};
use crate::gate::Asking;
use crate::http::{self, Answered, LARGEST_BODY, Serving};
use crate::live::Following;
use crate::metrics::{self, AskedBy};
use crate::report::report_refused;

/// The thread that answers.
pub struct Gated {
    pub asking: Asking,
    /// Matches rules, and has the limits in the memory of the host: those of bans.
    pub following: Following,
    pub serving: Arc<Serving>,
    /// The thread's number.
    pub number: usize,
}

impl Gated {
    /// Answer one request.
    pub async fn answer(&self, peer: Option<IpAddr>, request: Request<Incoming>) -> Answered {
        if let Some((by, description)) = http::proxied(&request) {
            if !self.serving.proxies {
                return http::not_for_proxies();
            }
            let worker = self.following.worker();
            let asked = http::asked_by(description, worker.plan.client.as_ref(), peer, request.headers());
            let asked = asked.map(|asked| worker.for_gate(&[asked], Mode::Charge));
            // It isn't held while Python is asked.
            drop(request);
            let decided = match asked {
                Err(reason) => Err(reason),
                Ok(asked) => Ok(self.decided(&worker, asked, 0).await),
            };
            return self.serving.decided(self.number, by, decided);
        }
        let method = request.method().clone();
        match (request.uri().path(), &method) {
            (path, _) if path.starts_with("/v1/") => match (api::call_at(path), &method) {
                (Some(call), &Method::POST) => self.asked_in_json(call, peer, request).await,
                (Some(_), _) => http::not_allowed("POST"),
                (None, _) => http::nothing_here(),
            },
            (path, method) => self.serving.page(path, method),
        }
    }

    /// The outcome of what this worker has matched. `size`: the bytes that are held meanwhile.
    pub async fn decided(&self, worker: &Worker, asked: Result<ForGate<'_>, Box<Outcome>>, size: usize) -> Outcome {
        match asked {
            Err(denied) => *denied,
            Ok(asked) => {
                let charged = worker.charged_by_gate(&self.asking, asked, size).await;
                // It is no permission, whatever a proxy does about errors.
                charged.unwrap_or_else(|reason| {
                    report_refused(&reason);
                    answers::undecided(&reason).into()
                })
            }
        }
    }

    async fn asked_in_json(&self, by: AskedBy, peer: Option<IpAddr>, request: Request<Incoming>) -> Answered {
        let worker = self.following.worker();
        if let Err(refusal) = self.serving.admitted(by, peer, worker.plan.client.as_ref(), request.headers()) {
            self.serving.count(self.number, by, metrics::Result::Refused);
            return http::not_admitted(refusal);
        }
        let (status, document) = match self.serving.bodies.read(request.into_body(), LARGEST_BODY).await {
            Err((status, reason)) => (status, Err(reason)),
            Ok(data) => match api::answer_by_gate(by, self, data).await {
                Err((status, reason)) => (status, Err(reason)),
                Ok(replied) => (StatusCode::OK, Ok(replied)),
            },
        };
        self.serving.replied(self.number, by, status, document)
    }
}
