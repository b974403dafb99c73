//! The module `forebay_server`, for Python.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::sync::watch;

use crate::access::Access;
use crate::answers::{self, Fields};
use crate::capi::{self, Word};
use crate::client::as_address;
use crate::decide::{Mode, Rules, Worker};
use crate::gate::{self, Asking};
use crate::live::Versions;
use crate::plan;
use crate::question::Charging;
use crate::readings::{self as paths, Readings};
use crate::report::report;
use crate::request::{Asked, Origin};
use crate::server::{self, Bound, Options};
use crate::tls::Tls;

#[pymodule]
mod forebay_server {
    #[pymodule_export]
    use super::{Gate, Plan, Server, layouts, readings, target_readings};
}

/// The rules of a file over their limiters.
#[pyclass(frozen, module = "forebay_server")]
struct Plan(Rules);

type Answer<'py> = (u16, Vec<(String, String)>, Bound_<'py>);
type Bound_<'py> = pyo3::Bound<'py, PyBytes>;

#[pymethods]
impl Plan {
    #[new]
    fn new(py: Python<'_>, document: &str, limiters: Vec<pyo3::Bound<'_, PyAny>>) -> PyResult<Plan> {
        let plan = plan::Plan::new(py, document, &limiters, false).map_err(PyValueError::new_err)?;
        Ok(Plan(Rules { plan: Arc::new(plan), charging: None }))
    }

    /// Decide a request of a peer, as a proxy asks about it.
    #[pyo3(signature = (method, uri, headers, peer))]
    fn decide<'py>(
        &self,
        py: Python<'py>,
        method: &str,
        uri: &[u8],
        headers: Vec<(String, Vec<u8>)>,
        peer: Option<&str>,
    ) -> PyResult<Answer<'py>> {
        let (fields, origin) = (fields_of(&headers)?, origin_of(peer)?);
        let worker = worker_of(&self.0)?;
        let readings = paths::of_target(uri);
        let asked = Asked::new(method, readings, &fields, worker.plan.client.as_ref(), origin);
        let outcome = worker.decide(&asked, Mode::Charge);
        Ok(answer_of(py, outcome.fields, outcome.denial))
    }
}

/// Rules whose limits Python charges.
#[pyclass(frozen, module = "forebay_server")]
struct Gate {
    rules: Rules,
    gate: Arc<gate::Gate>,
    /// For `decide`.
    asking: OnceLock<(Asking, watch::Sender<bool>)>,
}

#[pymethods]
impl Gate {
    #[new]
    #[pyo3(signature = (document, limiters, charging, *, books, threads, within_s, takes_s))]
    #[allow(clippy::too_many_arguments)] // They are keywords.
    fn new(
        py: Python<'_>,
        document: &str,
        limiters: Vec<pyo3::Bound<'_, PyAny>>,
        charging: Py<PyAny>,
        books: bool,
        threads: usize,
        within_s: f64,
        takes_s: f64,
    ) -> PyResult<Gate> {
        let plan = plan::Plan::new(py, document, &limiters, true).map_err(PyValueError::new_err)?;
        let charging = Some(Arc::new(Charging::new(charging, books)));
        let gate = Arc::new(gate::Gate::new(threads, duration(within_s)?, duration(takes_s)?));
        Ok(Gate { rules: Rules { plan: Arc::new(plan), charging }, gate, asking: OnceLock::new() })
    }

    /// Decide a request of a peer, as a proxy asks about it.
    #[pyo3(signature = (method, uri, headers, peer))]
    fn decide<'py>(
        &self,
        py: Python<'py>,
        method: &str,
        uri: &[u8],
        headers: Vec<(String, Vec<u8>)>,
        peer: Option<&str>,
    ) -> PyResult<Answer<'py>> {
        let (fields, origin) = (fields_of(&headers)?, origin_of(peer)?);
        let (worker, asking) = (worker_of(&self.rules)?, self.asking()?);
        let decided = py.detach(move || {
            let asked = Asked::new(method, paths::of_target(uri), &fields, worker.plan.client.as_ref(), origin);
            match worker.for_gate(&[asked], Mode::Charge) {
                Err(denied) => Ok(*denied),
                Ok(asked) => {
                    server::in_event_loop(worker.charged_by_gate(asking, asked, 0)).and_then(|charged| charged)
                }
            }
        });
        let outcome = decided.map_err(PyValueError::new_err)?;
        Ok(answer_of(py, outcome.fields, outcome.denial))
    }
}

impl Gate {
    /// Its threads last as long.
    fn asking(&self) -> PyResult<&Asking> {
        if self.asking.get().is_none() {
            let (stop, stopped) = watch::channel(false);
            let (asking, _) = self.gate.start(stopped, Duration::ZERO).map_err(PyOSError::new_err)?;
            let _ = self.asking.set((asking, stop));
        }
        Ok(&self.asking.get().expect("it was set").0)
    }
}

fn worker_of(rules: &Rules) -> PyResult<Worker> {
    Worker::new(rules).map_err(|failure| PyValueError::new_err(rules.plan.core.message(failure)))
}

fn fields_of(headers: &[(String, Vec<u8>)]) -> PyResult<HeaderMap> {
    let mut fields = HeaderMap::new();
    for (name, value) in headers {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let value = HeaderValue::from_bytes(value).map_err(|error| PyValueError::new_err(error.to_string()))?;
        fields.append(name, value);
    }
    Ok(fields)
}

fn origin_of(peer: Option<&str>) -> PyResult<Origin> {
    let Some(text) = peer else { return Ok(Origin::Peer(None)) };
    let address = as_address(text).ok_or_else(|| PyValueError::new_err("the peer is no address"))?;
    Ok(Origin::Peer(Some(address)))
}

fn answer_of<'py>(py: Python<'py>, fields: Fields, denial: Option<answers::Answer>) -> Answer<'py> {
    match denial {
        None => (200, fields, PyBytes::new(py, b"")),
        Some(denial) => (denial.status, denial.fields, PyBytes::new(py, denial.body.as_bytes())),
    }
}

fn duration(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| PyValueError::new_err(format!("{seconds}: {error}")))
}

/// What the rules of a server are.
#[derive(FromPyObject)]
enum Given<'py> {
    Plan(pyo3::Bound<'py, Plan>),
    Gate(pyo3::Bound<'py, Gate>),
}

impl Given<'_> {
    fn rules(&self) -> Rules {
        match self {
            Given::Plan(plan) => plan.get().0.clone(),
            Given::Gate(gate) => gate.get().rules.clone(),
        }
    }
}

/// The number of the version in force, and its rules unless they can't be used.
fn made(py: Python<'_>, make: &Py<PyAny>) -> PyResult<(u64, Option<Rules>)> {
    let (number, given): (u64, Option<Given<'_>>) = make.call0(py)?.extract(py)?;
    Ok((number, given.map(|given| given.rules())))
}

/// A server that listens, and answers once `run` is called.
#[pyclass(frozen, module = "forebay_server")]
struct Server {
    rules: Rules,
    gate: Option<Arc<gate::Gate>>,
    /// None once it has run.
    bound: Mutex<Option<Bound>>,
    addresses: Vec<String>,
    options: Options,
}

#[pymethods]
impl Server {
    #[new]
    #[allow(clippy::too_many_arguments)] // They are keywords.
    #[pyo3(signature = (rules, listen, *, threads, connections, idle_s, drain_s, reuse_port, token, proxies, live, tls))]
    fn new(
        rules: Given<'_>,
        listen: Vec<String>,
        threads: usize,
        connections: usize,
        idle_s: f64,
        drain_s: f64,
        reuse_port: bool,
        token: Option<String>,
        proxies: bool,
        live: Option<(pyo3::Bound<'_, PyAny>, usize, u64, Py<PyAny>)>,
        tls: Option<(PathBuf, PathBuf)>,
    ) -> PyResult<Server> {
        let gate = match &rules {
            Given::Plan(_) => None,
            Given::Gate(gate) => Some(Arc::clone(&gate.get().gate)),
        };
        let rules = rules.rules();
        let versions = live.map(|(memory, offset, number, make)| {
            let make =
                move || Python::attach(|py| made(py, &make)).inspect_err(|error| report(&error.to_string())).ok();
            let word = Word::new(&memory, offset)?;
            PyResult::Ok(Arc::new(Versions::new(word, Box::new(make), number, rules.clone())))
        });
        let versions = versions.transpose()?;
        let (idle, drain) = (duration(idle_s)?, duration(drain_s)?);
        let tls = tls.map(|(certificate, key)| Tls::new(certificate, key)).transpose();
        let tls = tls.map_err(PyOSError::new_err)?.map(Arc::new);
        let access = Access(token);
        let options = Options { threads, connections, idle, drain, reuse_port, access, proxies, versions, tls };
        let bound = Bound::new(&listen, &options).map_err(PyOSError::new_err)?;
        let addresses = bound.addresses.clone();
        Ok(Server { rules, gate, bound: Mutex::new(Some(bound)), addresses, options })
    }

    #[getter]
    fn addresses(&self) -> Vec<String> {
        self.addresses.clone()
    }

    /// Serve until SIGTERM or SIGINT: the seconds that are left for the end. `ready` is called once they end it so.
    fn run(&self, py: Python<'_>, ready: Py<PyAny>) -> PyResult<f64> {
        let bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner).take();
        let bound = bound.ok_or_else(|| PyOSError::new_err("a server runs once: make another one"))?;
        let ready = || Python::attach(|py| ready.call0(py)).map(drop).map_err(|error| error.to_string());
        let left = py
            .detach(|| server::run(&self.rules, self.gate.clone(), bound, &self.options, ready))
            .map_err(PyOSError::new_err)?;
        Ok(left.as_secs_f64())
    }
}

/// The readings of paths, as `forebay.web.native_requests.readings`.
#[pyfunction]
fn readings(paths: Vec<String>) -> Vec<String> {
    crate::readings::readings(&paths)
}

/// The readings of a target as a client has sent it: all, of the path as it was sent, and of the decoded path.
#[pyfunction]
fn target_readings(target: &[u8]) -> (Vec<String>, Vec<String>, Vec<String>) {
    let Readings { all, sent, decoded } = paths::of_target(target);
    (all, sent, decoded)
}

/// Each struct of forebay.h with its size and the offsets of its fields, and the constants, as they were compiled.
#[pyfunction]
fn layouts() -> (Vec<capi::Layout>, Vec<(&'static str, i64)>) {
    (capi::LAYOUTS.to_vec(), capi::CONSTANTS.to_vec())
}
